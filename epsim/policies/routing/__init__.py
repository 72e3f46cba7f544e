"""Routers: which experts a token takes, given what the other tokens of its batch take."""
