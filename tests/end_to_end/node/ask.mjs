// Asks a server by each of the clients for JavaScript, and prints what came of it: a JSON object by client and method.
// Arguments: the URL of a server with the models minilm and reranker, and its key.
// The texts and the query are a JSON object on stdin.
import { readFileSync } from "node:fs";

import { InferenceClient } from "@huggingface/inference";
import { OllamaEmbeddings } from "@langchain/ollama";
import { OpenAIEmbeddings } from "@langchain/openai";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { VoyageAIClient } from "voyageai";

const [server, key] = process.argv.slice(2);
const { texts, query } = JSON.parse(readFileSync(0, "utf8"));
const headers = { Authorization: `Bearer ${key}` };

const openai = new OpenAI({ baseURL: `${server}/v1`, apiKey: key, maxRetries: 0 });
const ollama = new Ollama({ host: server, headers });
const v2 = new CohereClientV2({ token: key, environment: server });
const v1 = new CohereClient({ token: key, environment: server });
const voyage = new VoyageAIClient({ apiKey: key, environment: `${server}/v1` });
const hub = new InferenceClient(key);
const onOllama = (model) => new OllamaEmbeddings({ model, baseUrl: server, headers, maxRetries: 0 });
const onOpenAI = new OpenAIEmbeddings({ model: "minilm", apiKey: key, configuration: { baseURL: `${server}/v1` } });

const calls = {
  "openai embeddings": async () =>
    (await openai.embeddings.create({ model: "minilm", input: texts })).data.map((item) => item.embedding),
  "openai models": async () => (await openai.models.list()).data.map((model) => model.id),
  "openai error": () => openai.embeddings.create({ model: "another", input: texts }),
  "langchain openai": () => onOpenAI.embedDocuments(texts),
  "ollama embed": async () => (await ollama.embed({ model: "minilm", input: texts })).embeddings,
  "ollama embeddings": async () => [(await ollama.embeddings({ model: "minilm", prompt: texts[0] })).embedding],
  "ollama models": async () => (await ollama.list()).models.map((model) => model.name),
  "ollama running": async () => (await ollama.ps()).models.map((model) => model.name),
  "ollama show": async () => (await ollama.show({ model: "minilm" })).model_info["bert.context_length"],
  "ollama pull": async () => (await ollama.pull({ model: "minilm" })).status,
  "ollama error": () => ollama.embed({ model: "another", input: texts }),
  "langchain ollama": () => onOllama("minilm").embedDocuments(texts),
  "langchain ollama error": () => onOllama("another").embedDocuments(texts),
  "cohere embed": async () =>
    (
      await v2.embed({ model: "minilm", texts, inputType: "search_document", embeddingTypes: ["float"] })
    ).embeddings.float,
  "cohere rerank": async () =>
    (await v2.rerank({ model: "reranker", query, documents: texts })).results.map((result) => [
      result.index,
      result.relevanceScore,
    ]),
  "cohere rerank, version 1": async () =>
    (await v1.rerank({ model: "reranker", query, documents: texts })).results.map((result) => [
      result.index,
      result.relevanceScore,
    ]),
  "cohere error": () => v2.rerank({ model: "another", query, documents: texts }, { maxRetries: 0 }),
  "voyage embed": async () => (await voyage.embed({ model: "minilm", input: texts })).data.map((item) => item.embedding),
  "voyage rerank": async () =>
    (await voyage.rerank({ model: "reranker", query, documents: texts })).data.map((item) => [
      item.index,
      item.relevanceScore,
    ]),
  "voyage error": () => voyage.embed({ model: "another", input: texts }, { maxRetries: 0 }),
  "hub features": () => hub.endpoint(`${server}/embed`).featureExtraction({ inputs: texts }),
  "hub similarity": () =>
    hub.endpoint(server).sentenceSimilarity({ inputs: { source_sentence: query, sentences: texts } }),
};

const outcomes = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    outcomes[name] = { value: await call() };
  } catch (error) {
    const status = error.status ?? error.statusCode ?? error.status_code;
    outcomes[name] = { error: error.constructor.name, message: error.message, status };
  }
}
// Kept connections would keep the program alive.
process.stdout.write(JSON.stringify(outcomes), () => process.exit(0));
