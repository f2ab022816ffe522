"""GRPO: rewards decide, an engine samples under the rule, and the trainer's probabilities are those of the engine.

The loop is our own. TRL's trainer starts its own vLLM (0.31 at the latest), loads the policy into it by merging, knows
no prompt boundary in its forward pass, and reads the sampled probabilities of a custom rollout only where its own
engine made them. Its loss is the reference that ours is tested against.
"""
