"""No verdict of a test may depend on how busy the machine is: hypothesis is told so here."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")
