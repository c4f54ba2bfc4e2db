package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
	"gorgonia.org/leanattention/internal/cpu/_gen/amx"
)

func loadTileConfig(config Register) { Instruction(amx.LoadConfig(config)) }

func releaseTiles() { Instruction(amx.Release()) }

func zeroTile(t int) { Instruction(amx.Zero(t)) }

func loadTile(base, ld Register, t int) { Instruction(amx.Load(base, ld, t)) }

func storeTile(t int, base, ld Register) { Instruction(amx.Store(t, base, ld)) }

func multiplyTiles(a, b, c int) { Instruction(amx.Multiply(a, b, c)) }

// tileConfig returns where the sizes lie of tiles of 64 bytes a row: rows rows in sums and factors, the
// first seven, and 16 in the last.
func tileConfig(rows int) Mem {
	if m, ok := tileConfigurations[rows]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("tiles%d", rows), RODATA|NOPTR)
	for i, x := range amx.Config(rows) {
		DATA(8*i, U64(x))
	}
	tileConfigurations[rows] = m
	return m
}

var tileConfigurations = map[int]Mem{}
