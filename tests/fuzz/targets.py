"""The table of what is fuzzed."""

from __future__ import annotations

from fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    Target("wire-from-worker", "fuzz.of_wire:from_worker", "msgpack"),
    Target("wire-to-worker", "fuzz.of_wire:to_worker", "msgpack"),
    Target(
        "wire-addresses", "fuzz.of_wire:addresses", "text", words=("ipc://", "tcp://", "#tcp=", "&node=", ":")
    ),
    Target("wire-endpoints", "fuzz.of_wire:endpoints", "text", words=("fd://", "[::1]", ":")),
    Target("wire-mailbox", "fuzz.of_wire:mailbox", "bytes", words=("ipc://", "tcp://")),
    Target("wire-tensor-stream", "fuzz.of_wire:tensor_stream", "bytes"),
    Target(
        "wire-tensor-sizes", "fuzz.of_wire:tensor_sizes", "msgpack", words=("float64", "bool", "bfloat16")
    ),
    Target("wire-rings", "fuzz.of_wire:rings", "msgpack"),
    Target("wire-secret", "fuzz.of_wire:secret_files", "bytes"),
    Target("wire-traceparent", "fuzz.of_wire:traceparent", "text"),
    Target(
        "wire-packed-messages",
        "fuzz.of_wire:packed_messages",
        "msgpack",
        words=("float32", "int64", "quint8"),
    ),
    Target("wire-otlp", "fuzz.of_wire:otlp", "json"),
    Target(
        "bundle-pipeline",
        "fuzz.of_bundles:pipeline_json",
        "json",
        words=("program", "looping", "../x", "stages"),
    ),
    Target("bundle-files", "fuzz.of_bundles:bundle_files", "bytes"),
    Target(
        "bundle-safetensors", "fuzz.of_bundles:safetensors_header", "json", words=("F32", "U8", "BF16", "I64")
    ),
    Target(
        "bundle-model-folder", "fuzz.of_bundles:model_folder", "json", words=("Pooling", "default", "</s>")
    ),
    Target(
        "bundle-model-config", "fuzz.of_bundles:model_config", "json", words=("gelu", "yarn", "layer_types")
    ),
    Target("bundle-gguf", "fuzz.of_bundles:gguf_file", "bytes", words=("llama", "tokenizer.ggml.tokens")),
    Target("bundle-ctranslate2", "fuzz.of_bundles:ctranslate2", "bytes"),
    Target(
        "bundle-tokenizer",
        "fuzz.of_text:tokenizer",
        "json",
        words=("WordPiece", "Unigram", "Split", "Regex"),
    ),
    Target(
        "bundle-chat-template",
        "fuzz.of_text:chat_templates",
        "text",
        words=("{{", "}}", "{%", "%}", "|", "tojson"),
    ),
    Target(
        "router-generation",
        "fuzz.of_router:generation",
        "json",
        words=("stop", "/v1/chat/completions", "user"),
    ),
    Target("router-items", "fuzz.of_router:items", "json", words=("input", "base64", "top_k", "[MASK]")),
    Target(
        "router-images", "fuzz.of_router:pictures", "bytes", words=("IHDR", "zTXt", "iCCP", "<f4", "descr")
    ),
    Target("router-wav", "fuzz.of_router:wav", "bytes", words=("fmt ", "data")),
    Target(
        "router-forms", "fuzz.of_router:forms", "text", words=("--xyz", "base64", "quoted-printable", "gzip")
    ),
    Target("router-start", "fuzz.of_router:starting", "json", words=("whisper", "wide_resnet", "bert")),
    Target(
        "control-deployments", "fuzz.of_control:deployments", "json", words=("keystage.role", "KEYSTAGE_ROLE")
    ),
    Target(
        "control-labels",
        "fuzz.of_control:labels",
        "json",
        words=("com.openfaas.scale.min", "capacity", "cpu"),
    ),
    Target(
        "control-durations", "fuzz.of_control:durations", "text", words=("h", "ns", "\u00b5s", "Gi", "e", "+")
    ),
    Target(
        "control-queries",
        "fuzz.of_control:queries",
        "text",
        words=("tail=", "since=", "http://", "redis://", "@"),
    ),
    Target(
        "control-stack",
        "fuzz.of_control:stack",
        "text",
        words=("&a", "*a", "<<", "!!python", "${A}", "- ", "? "),
    ),
    Target("control-policy", "fuzz.of_control:policy", "json"),
    Target("control-decisions", "fuzz.of_control:decisions", "json"),
    Target("control-stored-state", "fuzz.of_control:stored_state", "json"),
    Target(
        "control-upstream", "fuzz.of_control:upstream", "bytes", words=("chunked", "Content-Length: ", "\r\n")
    ),
    Target("control-keysmanager", "fuzz.of_control:keysmanager", "msgpack"),
    Target("control-settings", "fuzz.of_control:nodes_and_devices", "text", words=("-", "=", ",", ":", "x")),
    Target(
        "cluster-objects", "fuzz.of_cluster:objects", "json", words=("True", "Pending", "keystage.dev/site")
    ),
    Target(
        "load-traces",
        "fuzz.of_load:traces",
        "text",
        words=("HashOwner", "timestamp", "TIMESTAMP", "hash_ids"),
    ),
    Target(
        "load-joined-traces", "fuzz.of_load:joined_traces", "text", words=("percentile_Average_50", "HashApp")
    ),
    Target(
        "load-plans", "fuzz.of_load:plans", "text", words=("gamma", "steps:", "replay:", "*", ";", "=", ",")
    ),
    Target("load-runs", "fuzz.of_load:runs", "json", words=("version", "plan", "first_s")),
    Target(
        "load-answers", "fuzz.of_load:answers", "text", words=("data:", "\r\n", "\r", "[DONE]", "choices")
    ),
    Target(
        "load-connections", "fuzz.of_load:connections", "text", words=("chunked", "Content-Length: ", "\r\n")
    ),
    Target("program-router", "fuzz.of_programs:router", "json", 20.0, is_forking=True, share=3),
    Target("program-worker", "fuzz.of_programs:worker", "json", 20.0, is_forking=True, share=3),
    Target("program-gateway", "fuzz.of_programs:gateway", "json", 20.0, is_forking=True, share=3),
    Target("program-controller", "fuzz.of_programs:controller", "json", 20.0, is_forking=True, share=3),
    Target("program-keysmanager", "fuzz.of_programs:keysmanager", "json", 20.0, is_forking=True, share=3),
    Target("program-device-plugin", "fuzz.of_programs:device_plugin", "json", 20.0, is_forking=True, share=3),
    Target("program-pod", "fuzz.of_programs:pod", "json", 20.0, is_forking=True, share=3),
    Target("program-supervisor", "fuzz.of_programs:supervisor", "json", 20.0, is_forking=True, share=3),
    Target(
        "program-bundle", "fuzz.of_programs:bundles", "json", 20.0, words=("../x", "whisper"), is_forking=True
    ),
)

ITSELF = tuple(
    Target(f"itself-{name}", f"fuzz.of_itself:{name}", "bytes", input_s=2.0)
    for name in ("crash", "hang", "memory", "claim")
)
"""Wrong on purpose, and run only where they are asked for."""


def named(name: str) -> Target:
    """The target of that name.

    Raises:
        KeyError: there is none.
    """
    return {target.name: target for target in (*TARGETS, *ITSELF)}[name]
