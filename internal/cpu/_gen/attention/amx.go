package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Neither avo nor Go's assembler knows the instructions of AMX. Here they are instructions of avo with names
// only, so that it finds registers for their operands; encode then writes them as bytes.

// tileInstruction adds an instruction on tile registers and on general ones, which it reads.
func tileInstruction(opcode string, tiles []int, registers ...Register) {
	i := &ir.Instruction{Opcode: opcode}
	for _, t := range tiles {
		i.Operands = append(i.Operands, U8(t))
	}
	for _, r := range registers {
		i.Operands = append(i.Operands, r)
		i.Inputs = append(i.Inputs, r)
	}
	Instruction(i)
}

// loadTileConfig makes tile registers of the sizes that lie in memory.
func loadTileConfig(config Register) { tileInstruction("LDTILECFG", nil, config) }

// releaseTiles puts tile registers back to where threads need not save them.
func releaseTiles() { tileInstruction("TILERELEASE", nil) }

func zeroTile(t int) { tileInstruction("TILEZERO", []int{t}) }

// loadTile loads rows that lie ld bytes apart.
func loadTile(base, ld Register, t int) { tileInstruction("TILELOADD", []int{t}, base, ld) }

func storeTile(t int, base, ld Register) { tileInstruction("TILESTORED", []int{t}, base, ld) }

// multiplyTiles adds to c the product of a and b, in float32 of bfloat16: c[r][n] += a[r][2k+i] b[k][2n+i].
// Numbers that are not normal are 0.
func multiplyTiles(a, b, c int) { tileInstruction("TDPBF16PS", []int{c, a, b}) }

// The encodings: VEX.128, map 0F38, W0.
var tileEncodings = map[string]struct{ prefix, opcode int }{
	"LDTILECFG":   {0, 0x49},
	"TILERELEASE": {0, 0x49},
	"TILEZERO":    {3, 0x49},
	"TILELOADD":   {3, 0x4b},
	"TILESTORED":  {2, 0x4b},
	"TDPBF16PS":   {2, 0x5c},
}

var (
	tileLine        = regexp.MustCompile(`(?m)^\t(LDTILECFG|TILE[A-Z]+|TDPBF16PS)\b *(.*)$`)
	registerNumbers = map[string]int{"AX": 0, "CX": 1, "DX": 2, "BX": 3, "SP": 4, "BP": 5, "SI": 6, "DI": 7}
)

// encode writes the instructions of AMX in an assembly file as bytes.
func encode(text string) string {
	return tileLine.ReplaceAllStringFunc(text, func(line string) string {
		m := tileLine.FindStringSubmatch(line)
		var tiles, registers []int
		for _, s := range strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' || r == ' ' }) {
			if t, ok := strings.CutPrefix(s, "$"); ok {
				n, err := strconv.ParseInt(t, 0, 8)
				if err != nil {
					panic(err)
				}
				tiles = append(tiles, int(n))
			} else if n, ok := registerNumbers[s]; ok {
				registers = append(registers, n)
			} else if n, err := strconv.Atoi(strings.TrimPrefix(s, "R")); err == nil {
				registers = append(registers, n)
			} else {
				panic("no register: " + s)
			}
		}
		e, tile, other, free := tileEncodings[m[1]], 0, 0, 15
		if len(tiles) > 0 {
			tile = tiles[0]
		}
		var operands []int
		x, b := 1, 1 // bits that are 0 for the upper eight registers
		switch {
		case len(registers) > 0:
			index := 4 // none
			if len(registers) == 2 {
				index = registers[1]
				x = 1 - index/8
			}
			b = 1 - registers[0]/8
			operands = []int{0x44 | tile<<3, index%8<<3 | registers[0]%8, 0} // with an offset of 0
		case len(tiles) == 3:
			other, free = tiles[1], 15-tiles[2]
			fallthrough
		default:
			operands = []int{0xc0 | tile<<3 | other}
		}
		var out []string
		for _, n := range append([]int{0xc4, 0x82 | x<<6 | b<<5, free<<3 | e.prefix, e.opcode}, operands...) {
			out = append(out, fmt.Sprintf("BYTE $0x%02x", n))
		}
		return "\t" + strings.Join(out, "; ") + " // " + strings.TrimSpace(line)
	})
}

// tileConfig returns where the sizes lie of tiles of 64 bytes a row: rows rows in sums and factors, the
// first seven, and 16 in the last.
func tileConfig(rows int) Mem {
	name := fmt.Sprintf("tiles%d", rows)
	if m, ok := tileConfigurations[rows]; ok {
		return m
	}
	m := GLOBL(name, RODATA|NOPTR)
	const each = 0x0101010101010101
	bytes, count := uint64(64*0x0001000100010001), uint64(rows)*each>>8|16<<56 // of a row; rows
	for i, x := range []uint64{1: 0, 2: bytes, 3: bytes, 6: count, 7: 0} {
		if i == 0 {
			x = 1 // the palette
		}
		DATA(8*i, U64(x))
	}
	tileConfigurations[rows] = m
	return m
}

var tileConfigurations = map[int]Mem{}
