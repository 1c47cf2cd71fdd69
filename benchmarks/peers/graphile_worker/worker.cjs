/**
 * graphile-worker, tuned: jobs fetched and completed in batches, prepared statements, persistent connections, no log.
 *
 * With the argument `tables`, creates graphile-worker's tables and exits.
 */
"use strict";

const { readFileSync } = require("node:fs");
const { Logger, run, runMigrations } = require("graphile-worker");
const pg = require("pg");
const undici = require("undici");

const { env } = process;
const HEADERS = { authorization: "Bearer SG.benchmark", "content-type": "application/json" };
const TIMEOUT_MS = 20_000;

const concurrentJobs = Number(env.PEER_CONCURRENCY ?? 1);
const database = new pg.Pool({ connectionString: env.PEER_DATABASE_URL, max: Number(env.PEER_CONNECTIONS ?? 1) });
const sendgrid = new undici.Pool(env.PEER_SENDGRID_HOST, {
  connections: concurrentJobs,
  connect: { ca: readFileSync(env.PEER_CA_FILE), timeout: 5_000 },
  headersTimeout: TIMEOUT_MS,
  bodyTimeout: TIMEOUT_MS,
});

/** Lease the email and read its content in one statement, send it, and record the outcome. */
async function send_email({ email_id }) {
  const email = await lease(email_id);
  if (!email) return;
  const response = await sendgrid.request({
    method: "POST",
    path: "/v3/mail/send",
    headers: HEADERS,
    body: JSON.stringify({
      personalizations: [{ to: [{ email: email.recipient }] }],
      from: { email: email.sender },
      subject: email.subject,
      content: [{ type: "text/plain", value: email.body }],
      custom_args: { email_id },
    }),
  });
  await response.body.dump();
  if (response.statusCode !== 202) throw new Error(`SendGrid answered ${response.statusCode}`);
  const values = [email_id, email.lease_token, response.headers["x-message-id"]];
  await database.query({ name: "record", text: env.PEER_RECORD, values });
}

/** The leased email; undefined if the email was sent. Throws if another worker has the lease. */
async function lease(email_id) {
  const values = [email_id, Number(env.PEER_LEASE_SECONDS)];
  const leased = await database.query({ name: "lease", text: env.PEER_LEASE, values });
  if (leased.rows.length) return leased.rows[0];
  const looked = await database.query({ name: "look", text: env.PEER_LOOK, values: [email_id] });
  if (looked.rows.length && looked.rows[0].status !== "sent") throw new Error("another worker has the lease");
  return undefined;
}

async function main() {
  const logger = new Logger(() => (level, message) => {
    if (level === "error") console.error(message);
  });
  if (process.argv[2] === "tables") {
    await runMigrations({ pgPool: database, logger });
  } else {
    const worker = {
      concurrentJobs,
      localQueue: { size: Number(env.PEER_QUEUE_SIZE) },
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
    };
    const runner = await run({ preset: { worker }, pgPool: database, taskList: { send_email }, logger });
    await runner.promise;
  }
  await Promise.all([database.end(), sendgrid.close()]);
}

main();
