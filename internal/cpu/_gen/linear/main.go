// Command linear writes the assembly of the linear layers, of ReadSum, of dropout, of norms, of rounding and of loops over
// vectors of package cpu, and the Go declarations that go with it:
//
//	go -C internal/cpu/_gen run ./linear
//
// Structs of arguments and contracts are read from the package's Go sources, so that offsets follow the
// structs, and a declaration says what its Go twin says. The test proves that what is committed is what
// this program writes.
package main

import (
	"log"
	"os"
	"path/filepath"
)

// families holds every family of kernels by the name of its files.
var families = map[string]func(*gen){
	"dropout":      dropped,
	"linear":       linear,
	"linear_row":   linearRow,
	"linear_tiles": linearTiles,
	"norm":         norm,
	"readsum":      readSum,
	"rounded":      rounded,
	"sigmoid":      sigmoid,
	"softcap":      softCap,
	"vector":       vector,
}

func main() {
	log.SetFlags(0)
	const dir = ".."
	for name, family := range families {
		files, err := generate(dir, name, family)
		if err != nil {
			log.Fatalf("%s: %v", name, err)
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(dir, file), text, 0o666); err != nil {
				log.Fatal(err)
			}
		}
	}
}
