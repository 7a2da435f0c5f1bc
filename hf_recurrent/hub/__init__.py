"""Models to and from the Hugging Face Hub, and to folders that stand alone."""
