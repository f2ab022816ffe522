"""What can be said about an adapter without an engine: inspection and checks."""
