"""How fast this project is, part by part."""
