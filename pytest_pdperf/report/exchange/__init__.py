"""Numbers that go to other tools and come from them, each with the definition it was made by."""
