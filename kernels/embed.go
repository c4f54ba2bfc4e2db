//go:build !nogpu && (linux || windows) && (amd64 || arm64)

package kernels

import "embed"

//go:embed modules
var modules embed.FS

const whyEmpty = ""
