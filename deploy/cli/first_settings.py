"""The settings file that `sidecar config init` writes.

It has what a first set-up changes. Each line that starts with `# ` and holds `=` is a setting with
its default; the other lines that start with `#` explain.
"""

from __future__ import annotations

FIRST_SETTINGS = """\
#: Settings of the sidecar, for every process on this machine.
#: A line "# key = value" shows a default: remove the "# " and change the value.
#: `sidecar config check` tells whether this file is sound; restart the processes after a change.
#: Each value can also come from the environment: SIDECAR_<SECTION>__<KEY>. Keep secrets there.

#: Sockets, locks and logs. A relative path starts at the folder in which the sidecar runs.
# state_dir = ".sidecar"

[serving]
#: The vLLM that answers: its base URLs, without /v1.
upstreams = ["http://127.0.0.1:8000"]
#: The model name that agents send: vLLM's --served-model-name.
model = "smollm2-135m"
#: Folder or hub name of the weights that vLLM serves. The learner needs it.
base_model_path = ""
#: vLLM's --max-lora-rank and --max-loras.
# max_lora_rank = 16
# max_loras = 4
#: vLLM's --api-key belongs into the environment: SIDECAR_SERVING__API_KEY.

[judge]
#: Scores the answers: any LiteLLM name, such as "openai/gpt-5-mini" or "hosted_vllm/my-judge".
#: Without a judge the sidecar relays and records, and learns nothing.
model = ""
#: The judge's API key belongs into the environment: SIDECAR_JUDGE__API_KEY, or the variable that
#: its provider names. For a judge of your own, set the base URL: api_base.
#: Judge calls for each group, each in another order; the score is their mean.
# passes = 1

[proxy]
#: Where agents connect: set their base_url to http://<host>:<port>/v1.
# host = "127.0.0.1"
# port = 8080
#: Processes that share the port; one process uses about one core.
# workers = 1

[access]
#: "open": no key is asked for. "keys": keys that `sidecar keys create` makes. "upstream": vLLM
#: checks the agents' keys.
# mode = "open"

[capture]
#: Share of the requests that are recorded, 0 to 1.
# sample_rate = 1.0

[groups]
#: Answers that are compared in one group, with the one that the agent got.
# size = 8
#: Share of the suitable requests that become groups, 0 to 1.
# rate = 1.0
#: Share of the sessions that are never trained on: they test each new adapter, 0 to below 1.
# held_out_rate = 0.2
#: Tokens that vLLM may spend on further answers each day (UTC).
# tokens_per_day = 5000000

[learner]
#: When it trains: "groups" (min_groups are scored), "interval", "cron", or "manual".
# schedule = "groups"
# min_groups = 16
#: Optimiser steps for each run, and the rank of the LoRA.
# steps = 3
# rank = 8
#: vLLM must see this folder under the same absolute path.
# adapters_dir = ".sidecar/adapters"
#: "cpu", or a GPU such as "cuda:0".
# device = "cpu"

[canary]
#: Shares of the sessions that a new adapter gets, step by step, in basis points (10000 = all).
# steps = [2000, 5000]
#: Each step takes at least this many seconds and this many requests.
# step_min_s = 60.0
# step_min_exchanges = 20

[admin]
#: The admin API, which the `sidecar` command asks.
# host = "127.0.0.1"
# port = 8081

[store]
#: Any SQLAlchemy URL: what is recorded, and which adapter serves.
# url = "sqlite:///.sidecar/store.db"

[telemetry]
#: Traces for an OpenTelemetry collector, the whole URL; empty: none are sent.
# otlp_endpoint = ""
# log_level = "info"
"""
