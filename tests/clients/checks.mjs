// Checks of one client of JavaScript: each is a function; its name, result and output are one line of JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

export const URL_ROOT = (process.argv[2] ?? "http://127.0.0.1:8000").replace(/\/$/, "");
export const MODEL = process.argv[3] ?? "smollm2-135m";
export const BASE_URL = `${URL_ROOT}/v1`;
export const API_KEY = "none"; // clients require one; the server does not
export const QUESTION = "What is the weather in Paris?";
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Rome", "Lima"] },
    unit: { type: "string", enum: ["celsius", "fahrenheit"] },
  },
  required: ["city", "unit"],
  additionalProperties: false,
};

export function weather({ city, unit }) {
  return `18 degrees ${unit} in ${city}, sunny`;
}

export function isWeatherCall(call) {
  const found = typeof call === "string" ? JSON.parse(call) : call;
  const { properties } = WEATHER;
  return Object.keys(properties).every((key) => properties[key].enum.includes(found[key]));
}

export function assert(condition, message = "assertion failed") {
  if (!condition) throw new Error(message);
}

function version(name) {
  const folders = createRequire(import.meta.url).resolve.paths(name);
  for (const folder of folders) {
    try {
      return JSON.parse(readFileSync(`${folder}/${name}/package.json`)).version;
    } catch {
      continue; // not in this folder
    }
  }
  return null;
}

export async function runChecks(packages, checks) {
  const versions = Object.fromEntries(packages.map((name) => [name, version(name)]));
  console.log(JSON.stringify({ packages: versions }));
  for (const check of checks) {
    const begin = performance.now();
    const line = { check: check.name };
    try {
      Object.assign(line, { passed: true, output: await check() });
    } catch (error) {
      process.exitCode = 1;
      console.error(error);
      Object.assign(line, { passed: false, error: String(error).slice(0, 400) });
    }
    line.seconds = Math.round((performance.now() - begin) / 100) / 10;
    console.log(JSON.stringify(line));
  }
}
