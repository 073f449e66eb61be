"""Memory budget, residency planning and weight streaming."""
