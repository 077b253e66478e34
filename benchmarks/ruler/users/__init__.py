"""What users notice of the sampling of candidates: the part `ttft` of the ruler benchmark."""
