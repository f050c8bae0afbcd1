"""Brings a topology up, watches it and takes it down again without leaving anything behind."""
