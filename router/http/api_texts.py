"""The texts of `/docs`: groups, fields, and bodies to send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]

ANSWERS, MODELS, HEALTH, CLUSTER = "Answers", "Models and tokens", "Health", "Cluster"

GROUPS: Mapping[str, str] = {
    ANSWERS: "OpenAI's chats, completions and responses, and Anthropic's messages.",
    MODELS: "What is served, and how texts become tokens.",
    HEALTH: "For load balancers, Kubernetes and Prometheus.",
    CLUSTER: "The nodes behind this router.",
}
"""The groups of endpoints, which a route names as its tag."""

_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Berlin", "Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _CITY}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": _CITY}}

EXAMPLES: Mapping[str, Mapping[str, Body]] = {
    "/v1/chat/completions": {
        "A question": {"messages": _QUESTION, "max_tokens": 64},
        "A stream": {"messages": _QUESTION, "max_tokens": 64, "stream": True},
        "JSON of a schema": {"messages": _QUESTION, "max_tokens": 64, "response_format": _FORMAT},
        "A regular expression": {
            "messages": _QUESTION,
            "max_tokens": 16,
            "structured_outputs": {"regex": "[A-Z][a-z]{1,9}"},
        },
        "Log probabilities": {
            "messages": _QUESTION,
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 2,
        },
        "A tool": {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [_TOOL],
            "tool_choice": "required",
            "max_tokens": 100,
        },
    },
    "/v1/completions": {
        "A text": {"prompt": "The capital of France is", "max_tokens": 16},
        "Two texts, with log probabilities": {
            "prompt": ["The capital of France is", "Two and two are"],
            "max_tokens": 8,
            "logprobs": 1,
        },
    },
    "/v1/responses": {
        "A question": {"input": "What is the capital of France?", "max_output_tokens": 64},
        "A stream, with instructions": {
            "instructions": "Answer in one word.",
            "input": _QUESTION,
            "max_output_tokens": 64,
            "stream": True,
        },
    },
    "/v1/messages": {
        "A question": {"messages": _QUESTION, "max_tokens": 64, "system": "Be brief."}
    },
    "/v1/messages/count_tokens": {"A question": {"messages": _QUESTION, "system": "Be brief."}},
    "/tokenize": {"A text": {"prompt": "Hello world"}, "A conversation": {"messages": _QUESTION}},
    "/detokenize": {"Tokens": {"tokens": [40, 41, 42]}},
}
"""Bodies that work as they are, by path and by their names."""

_WITH_GRAMMAR = "one of several ways to constrain the answer"
FIELDS: Mapping[str, str] = {
    "model": "Name of the model; may be left out, because one is served.",
    "messages": "The conversation so far, oldest message first.",
    "prompt": "A text, texts, token ids, or lists of token ids.",
    "input": "A text, or messages, calls of functions and their results.",
    "instructions": "The system message.",
    "system": "The system message: a text, or blocks of text.",
    "n": "How many answers to give.",
    "best_of": "How many answers to compute, of which the `n` likeliest are given.",
    "stream": "Whether the answer comes as server-sent events, piece by piece.",
    "stream_options": "What a stream carries besides the answer.",
    "include_usage": "Whether a last event has the usage.",
    "continuous_usage_stats": "Whether each event has the usage so far.",
    "temperature": "0 to 2; 0 takes the likeliest token always.",
    "top_p": "Draw from the likeliest tokens that have this probability together.",
    "top_k": "Draw from this many likeliest tokens; -1 or 0: from all.",
    "min_p": "Draw from tokens with at least this share of the likeliest one's probability.",
    "repetition_penalty": "Above 1: tokens of the prompt and the answer become less likely.",
    "presence_penalty": "Above 0: tokens that the answer has become less likely.",
    "frequency_penalty": "Above 0: tokens become less likely with each time the answer has them.",
    "seed": "With the same seed, the same request draws the same tokens.",
    "stop": "A text, or texts, before which the answer ends.",
    "stop_sequences": "Texts before which the answer ends.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Whether the model's end token does not end the answer.",
    "min_tokens": "The answer does not end before it has this many tokens.",
    "max_tokens": "The most tokens of the answer, reasoning included.",
    "max_completion_tokens": "The most tokens of the answer; the later name of `max_tokens`.",
    "max_output_tokens": "The most tokens of the answer, reasoning included.",
    "logprobs": "Whether each token has its log probability; of completions, how many likely ones.",
    "top_logprobs": "How many of the likeliest tokens are reported for each.",
    "prompt_logprobs": "How many of the likeliest tokens are reported for each prompt token.",
    "echo": "Whether the answer begins with the prompt.",
    "priority": "-1000 to 1000, larger first, on nodes with --enable-priority-scheduling.",
    "truncate_prompt_tokens": "Keep this many last tokens of the prompt.",
    "add_special_tokens": "Whether a text gets the tokens of its beginning and end.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "include_stop_str_in_output": "Whether the text ends with the stop string.",
    "no_stop_trim": "The same; SGLang's name.",
    "return_token_ids": "Whether the answer has the ids of its tokens and of the prompt's.",
    "logit_bias": "-100 to 100 by token id, added to its logit.",
    "bad_words": "Words that the answer must not have.",
    "allowed_token_ids": "The only tokens that the answer may have.",
    "cache_salt": "Prefix caches share KV only between requests with the same salt.",
    "prompt_cache_key": "Names the session: its requests go to the same nodes.",
    "user": "Names the session where `prompt_cache_key` does not.",
    "response_format": f"OpenAI's `json_object` or `json_schema`: {_WITH_GRAMMAR}.",
    "structured_outputs": f"vLLM's `json`, `regex`, `choice` or `grammar`: {_WITH_GRAMMAR}.",
    "guided_json": f"A JSON schema: {_WITH_GRAMMAR}.",
    "guided_json_object": f"Whether any JSON object is wanted: {_WITH_GRAMMAR}.",
    "guided_regex": f"A regular expression: {_WITH_GRAMMAR}.",
    "guided_choice": f"The texts that may be answered: {_WITH_GRAMMAR}.",
    "guided_grammar": f"A grammar in GBNF or Lark: {_WITH_GRAMMAR}.",
    "json_schema": f"A JSON schema, SGLang's name: {_WITH_GRAMMAR}.",
    "regex": f"A regular expression, SGLang's name: {_WITH_GRAMMAR}.",
    "ebnf": f"A grammar in GBNF or Lark, SGLang's name: {_WITH_GRAMMAR}.",
    "text": "`format` constrains the answer to a JSON schema.",
    "output_config": "`format` constrains the answer; `effort` says how much to think.",
    "reasoning_effort": "How much to think, for templates that know it; `none`: not at all.",
    "thinking": "Whether to think, for templates that know it; `budget_tokens`: how much at most.",
    "enable_thinking": "Whether to think, for templates that know it.",
    "thinking_token_budget": "The most tokens of thinking; -1: no limit of its own.",
    "thinking_budget": "The same; Alibaba Cloud's name.",
    "thinking_budget_tokens": "The same; llama.cpp's name.",
    "chat_template_kwargs": "Variables of the chat template, such as `enable_thinking`.",
    "add_generation_prompt": "Whether the prompt ends with the beginning of an answer.",
    "continue_final_message": "Whether the answer continues the last message.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether it calls one: `auto`, `required`, `none`, or a function by name.",
    "parallel_tool_calls": "Whether an answer may have several calls.",
    "tokens": "Token ids.",
    "node_id": "Name of the node in `/v1/cluster`.",
    "role": "Who says it; of a node, which work it takes.",
    "content": "What is said: a text, or parts of text.",
    "name": "A name: of who says it, or of a function.",
    "reasoning_content": "What the assistant thought before it answered.",
    "reasoning": "How much to think, `effort`; of a message what was thought, vLLM's name.",
    "include_reasoning": "False: the answer is without what the model thinks.",
    "include": "`reasoning.encrypted_content`: thoughts also in a form to send back.",
    "tool_calls": "Calls that the assistant made.",
    "tool_call_id": "The call of which this is the result.",
    "id": "The id of the call.",
    "type": "The kind of the call.",
    "function": "What is called.",
    "arguments": "Its arguments: a JSON object, or the text of one.",
}
