"""A reward model of a policy's size: its decoder under a score head with random weights.

    python benchmarks/reward_model.py models/smollm2 models/smollm2-reward

For memory and time: what it prefers means nothing.
"""

import argparse

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("policy")
parser.add_argument("reward_model")
arguments = parser.parse_args()
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(
    arguments.policy, num_labels=1, dtype=torch.bfloat16
)
model.save_pretrained(arguments.reward_model)
AutoTokenizer.from_pretrained(arguments.policy).save_pretrained(arguments.reward_model)
