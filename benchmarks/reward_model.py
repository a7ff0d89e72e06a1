"""A reward model of a policy's size: its decoder under a score head with random weights.

    python benchmarks/reward_model.py models/smollm2 models/smollm2-reward

For memory and time: what it prefers means nothing.
"""

import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

source, target = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.bfloat16)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
