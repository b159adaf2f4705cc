"""Supervised fine-tuning and reward-model training, on the parts that PPO uses."""
