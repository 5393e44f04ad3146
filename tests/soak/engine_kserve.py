"""Reads an InferenceService by KServe's published models, and finds what they do not know."""

import json
import sys

import kserve
import yaml

with open(sys.argv[1]) as file:
    given = yaml.safe_load(file)


def unknown(value, kind, path=""):
    model = getattr(kserve, kind, None)
    if not isinstance(value, dict) or model is None:
        return []
    names = {v: k for k, v in model.attribute_map.items()}
    results = [f"{path}/{key}" for key in value if key not in names]
    for key in value.keys() & names.keys():
        results += unknown(value[key], model.openapi_types[names[key]], f"{path}/{key}")
    return results


missing = unknown(given, "V1beta1InferenceService")
if missing:
    raise SystemExit(f"KServe does not know {missing}")
model = given["spec"]["predictor"]["model"]
print(json.dumps({"name": given["metadata"]["name"], "model": model}))
