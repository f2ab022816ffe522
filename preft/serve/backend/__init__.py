"""What runs inside vLLM: scheduler, worker, and what passes between them. Official seams only, no patches."""
