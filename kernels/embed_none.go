//go:build nogpu || !((linux || windows) && (amd64 || arm64))

package kernels

import "embed"

// modules is empty: no GPU can be used by such a binary.
var modules, headers embed.FS

const whyEmpty = ": this binary was built without any"
