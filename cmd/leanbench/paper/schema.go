package paper

import _ "embed"

// Schema is the JSON Schema of what -json writes, as -schema prints it.
//
//go:embed schema.json
var Schema []byte
