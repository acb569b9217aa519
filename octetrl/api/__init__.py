"""OctetRL as a Python library: what `import octetrl` offers. Thin over run/; docs/library.md shows it in use."""
