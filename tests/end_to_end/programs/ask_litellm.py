"""Run by an interpreter that has litellm: makes the calls that stdin names, and prints what comes of each, as JSON.

A call is ``{"function": "embedding" | "rerank", "arguments": {…}}``; what comes of it is the vectors, or documents'
indices, scores and texts, or the name and the message of the exception.
"""

import json
import sys

import litellm

litellm.suppress_debug_info = True


def outcome(function: str, arguments: dict) -> dict:
    try:
        answer = getattr(litellm, function)(**arguments)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    if function == "embedding":
        return {"rows": [item["embedding"] for item in answer.data]}
    rows = [(row["index"], row["relevance_score"], row.get("document", {}).get("text")) for row in answer.results]
    return {"rows": rows}


if __name__ == "__main__":
    json.dump([outcome(**call) for call in json.load(sys.stdin)], sys.stdout)
