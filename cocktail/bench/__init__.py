"""Measures Cocktail beside other programs, on one document and in one process."""
