"""Router policies: they choose a token's experts depending on the experts that other tokens of the batch take."""
