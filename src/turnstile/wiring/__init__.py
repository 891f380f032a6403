"""The composition root, the only room that knows all others. Parts that do not need torch load without it."""
