"""Train a small DeBERTa-v3 from nothing on preference pairs, with torch and transformers.

    python benchmarks/deberta_reward_model.py harmless-base-test.jsonl.gz FOLDER

The pairs are HH-RLHF's. FOLDER becomes a checkpoint with SentencePiece's unigrams that
`reward.model_path` takes, a small stand-in for such as OpenAssistant's reward models. Prints the
accuracy on the pairs that were held out.
"""

import argparse
import gzip
import json
import platform
import time
from pathlib import Path

import tokenizers
import torch
import transformers

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
TURN = "\n\nAssistant:"
LONGEST = 128  # tokens of prompt and response; the longer one loses its start


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=1800, help="pairs; the others are held out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="pairs")
    parser.add_argument("--lr", type=float, default=5e-4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    pairs = read_pairs(arguments.pairs)
    train, held_out = pairs[: arguments.train], pairs[arguments.train :]
    tokenizer = train_tokenizer([text for pair in train for text in pair])
    model = make_model(len(tokenizer))
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {len(train)} pairs to train on, {len(held_out)} held out; "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    steps = arguments.epochs * (len(train) // arguments.batch)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    began = time.process_time()
    print(f"before: accuracy {accuracy(model, tokenizer, held_out):.3f}", flush=True)
    for epoch in range(arguments.epochs):
        model.train()
        order = torch.randperm(len(train)).tolist()
        for start in range(0, len(order) - arguments.batch + 1, arguments.batch):
            batch = [train[place] for place in order[start : start + arguments.batch]]
            margin = margins(model, tokenizer, batch)
            loss = -torch.nn.functional.logsigmoid(margin).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(
            f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}, accuracy "
            f"{accuracy(model, tokenizer, held_out):.3f}, {time.process_time() - began:.0f} "
            "processor seconds",
            flush=True,
        )
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print("written:", arguments.folder)


def read_pairs(path: Path) -> list[tuple[str, str, str]]:
    """Return prompt, chosen and rejected response of each pair."""
    pairs = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            prompt, turn, chosen = row["chosen"].rpartition(TURN)
            if row["rejected"].startswith(prompt + turn):
                pairs.append((prompt + turn, chosen, row["rejected"][len(prompt + turn) :]))
    return pairs


def train_tokenizer(texts: list[str]) -> transformers.DebertaV2Tokenizer:
    """Return a tokenizer of 4,000 unigrams that encodes [CLS] prompt [SEP] response [SEP]."""
    unigrams = tokenizers.Tokenizer(tokenizers.models.Unigram())
    unigrams.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=4000, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
    )
    unigrams.train_from_iterator(texts, trainer)
    vocabulary = [tuple(piece) for piece in json.loads(unigrams.to_str())["model"]["vocab"]]
    return transformers.DebertaV2Tokenizer(vocab=vocabulary, unk_id=SPECIAL.index("[UNK]"))


def make_model(vocabulary: int) -> torch.nn.Module:
    """Return a DeBERTa-v3 with random weights and one score."""
    config = transformers.DebertaV2Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=512,
        relative_attention=True,
        position_buckets=64,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        type_vocab_size=0,
        pad_token_id=SPECIAL.index("[PAD]"),
        num_labels=1,
    )
    return transformers.DebertaV2ForSequenceClassification(config)


def margins(model, tokenizer, pairs) -> torch.Tensor:
    """Return the score of the chosen response minus the rejected one's, float32 [pairs]."""
    prompts = [prompt for prompt, _, _ in pairs]
    responses = [pair[1] for pair in pairs] + [pair[2] for pair in pairs]
    tokenizer.truncation_side = "left"
    inputs = tokenizer(
        prompts * 2,
        responses,
        max_length=LONGEST,
        truncation="longest_first",
        padding=True,
        return_tensors="pt",
    )
    scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    chosen, rejected = scores[:, 0].chunk(2)
    return chosen - rejected


def accuracy(model, tokenizer, pairs) -> float:
    """Return the share of pairs whose chosen response has the higher score."""
    model.eval()
    with torch.no_grad():
        won = [
            margins(model, tokenizer, pairs[start : start + 64]) > 0
            for start in range(0, len(pairs), 64)
        ]
    return torch.cat(won).float().mean().item()


if __name__ == "__main__":
    main()
