"""Fine-tuning a causal language model of transformers, whole or by LoRA adapters of peft.

Owns the parts that only this task needs: the model's folder, documents and their packing into rows,
names of weights, and what `from_pretrained` reads at the end. transformers and peft come with the
extra `fullshard-train[hf]`, and are imported where they are used, so other tasks do without them.
"""
