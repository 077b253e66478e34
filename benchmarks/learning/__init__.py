"""Does the learner learn: verifiable tasks on the real model and the real vLLM, with null runs."""
