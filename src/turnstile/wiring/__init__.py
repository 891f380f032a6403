"""The composition root: the only room that knows the whole house. What needs no torch here loads without it."""
