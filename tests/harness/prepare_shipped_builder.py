"""Prepare GSM8K with the builder that TFDS ships, from files that this script serves.

.ci/wheel runs this in an environment that holds the wheel and the dependencies that it declares,
and nothing else.
"""

import functools
import http.server
import json
import os
import pathlib
import threading

from tensorflow_datasets.text.gsm8k import gsm8k

from jax_ppo.data.sources import read_examples

folder = pathlib.Path("served")
folder.mkdir()
for name in gsm8k._URLS:
    row = {"question": name, "answer": "2+2=4 #### 4"}
    (folder / f"{name}.jsonl").write_text(json.dumps(row))
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for name in gsm8k._URLS:
    gsm8k._URLS[name] = f"http://127.0.0.1:{server.server_port}/{name}.jsonl"
os.environ["TFDS_DATA_DIR"] = "tfds"
(example,) = read_examples("tfds:gsm8k/train")
print(example.prompt[0]["content"], example.ground_truth)
