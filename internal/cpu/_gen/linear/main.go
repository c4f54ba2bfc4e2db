// Command linear writes the assembly of the linear layers, of ReadSum, of dropout, of norms, of rounding and of loops over
// vectors of package cpu and of those in it, and the Go declarations that go with it:
//
//	go -C internal/cpu/_gen run ./linear
//
// Structs of arguments and contracts are read from the packages' Go sources, so that offsets follow the
// structs, and a declaration says what its Go version says. The test proves that what is committed is what
// this program writes.
package main

import (
	"log"
	"os"
	"path/filepath"
)

// A family is the kernels of one file.
type family struct {
	dir  string // of the package, in internal/cpu; "": that package itself
	name string // of the file
	make func(*gen)
}

var families = []family{
	{"vector", "activation", activation},
	{"attention", "dropout", dropped},
	{"linear", "blocks", linearBlocks},
	{"linear", "dot", linear},
	{"expression", "step", expressions},
	{"linear", "row", linearRow},
	{"linear", "strips", linearStrips},
	{"matmul", "tiles", matmulTiles},
	{"norm", "norm", norm},
	{"", "readsum", readSum},
	{"vector", "rounded", rounded},
	{"vector", "sigmoid", sigmoid},
	{"vector", "softcap", softCap},
	{"vector", "vector", vector},
	{"vector", "widened", widened},
}

func main() {
	log.SetFlags(0)
	const root = ".."
	for _, f := range families {
		files, err := generate(root, f)
		if err != nil {
			log.Fatalf("%s: %v", f.name, err)
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(root, file), text, 0o666); err != nil {
				log.Fatal(err)
			}
		}
	}
}
