"""Vision-language embedding models: images among the tokens of a text."""
