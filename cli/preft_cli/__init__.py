"""The `preft` command line. Only this package draws on the terminal."""
