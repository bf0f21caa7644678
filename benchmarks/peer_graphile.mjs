// graphile-worker on the same work: enqueue jobs, drain them with one worker, print jobs per second as JSON.
// Arguments: jobs, concurrency, size of the local queue. The server is the one of PGHOST.
import { makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";

const [jobs, concurrency, local] = process.argv.slice(2).map(Number);
const CHUNK = 5000;
const pgPool = new pg.Pool({ max: concurrency + 4 });
pgPool.on("error", () => {});
pgPool.on("connect", (client) => client.on("error", () => {}));
const utils = await makeWorkerUtils({ pgPool });
await utils.migrate();
const blob = "x".repeat(230);
for (let start = 0; start < jobs; start += CHUNK) {
  const numbers = Array.from({ length: Math.min(CHUNK, jobs - start) }, (_, k) => start + k);
  await utils.addJobs(numbers.map((n) => ({ identifier: "plain", payload: { n, blob } })));
}

let count = 0;
let sum = 0;
let began = 0;
let seenAll;
const all = new Promise((resolve) => (seenAll = resolve));
const plain = async ({ n }) => {
  if (count === 0) began = performance.now();
  count += 1;
  sum += n;
  if (count === jobs) seenAll();
};
const worker = { concurrentJobs: concurrency, completeJobBatchDelay: 0, failJobBatchDelay: 0, localQueue: { size: local } };
const runner = await run({ pgPool, noHandleSignals: true, preset: { worker }, taskList: { plain } });
await all;
// A job that has succeeded is deleted.
while ((await pgPool.query("select from graphile_worker.jobs limit 1")).rowCount > 0) {
  await new Promise((resolve) => setTimeout(resolve, 5));
}
const seconds = (performance.now() - began) / 1000;
console.log(JSON.stringify({ jobs_per_second: (jobs - 1) / seconds, sum }));
await runner.stop();
await pgPool.query("drop schema graphile_worker cascade");
await pgPool.end();
process.exit(0);
