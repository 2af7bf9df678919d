"""Classifiers of texts, of pairs and of tokens; cross-encoders among them."""
