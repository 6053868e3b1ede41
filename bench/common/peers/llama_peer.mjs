// Server of llama.cpp through node-llama-cpp, whose package has builds for several instruction sets.
//
//     node llama_peer.mjs FOLDER MODEL.gguf THREADS
//
// FOLDER has node_modules/node-llama-cpp. The first line of stdout is JSON with the URL. POST /completion takes
// {prompt: [ids], n_predict} and returns llama.cpp's timings. Ends when standard input is closed.

import http from "node:http";
import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads] = process.argv.slice(2);
const entry = path.resolve(folder, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry));
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 4096, threads: Number(threads), batchSize: 512});
const sequence = context.getSequence();

async function complete(prompt, count) {
    await sequence.clearHistory();
    const begin = performance.now();
    let first = 0, tokens = 0;
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        first ||= performance.now();
        if (++tokens > count) break;
    }
    const end = performance.now();
    return {
        prompt_n: prompt.length,
        prompt_per_second: prompt.length * 1000 / (first - begin),
        predicted_n: tokens - 1,
        predicted_per_second: (tokens - 1) * 1000 / (end - first)
    };
}

const server = http.createServer(async (request, response) => {
    let text = "";
    for await (const chunk of request) text += chunk;
    const {prompt, n_predict} = JSON.parse(text);
    const timings = await complete(prompt, n_predict);
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify({timings}));
});
server.listen(0, "127.0.0.1", () => {
    const maps = fs.readFileSync("/proc/self/maps", "utf8");
    console.log(JSON.stringify({
        url: `http://127.0.0.1:${server.address().port}`,
        "node-llama-cpp": JSON.parse(fs.readFileSync(path.join(entry, "../../package.json"))).version,
        instructions: maps.match(/libggml-cpu-(\w+)\.so/)?.[1] ?? "unknown"
    }));
});
process.stdin.on("end", () => process.exit(0)).resume();
