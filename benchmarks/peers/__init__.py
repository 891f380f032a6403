"""This project compared with other frameworks."""
