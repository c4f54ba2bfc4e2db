package layers

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// putPacked puts random packed weights of a format into memory. Scales are near 1.
func (m *machine) putPacked(t testing.TB, rng *rand.Rand, f weight.Format, in, out int) (*weight.Packed, gpu.Memory) {
	t.Helper()
	p, err := weight.Packing(&weight.Matrix{Format: f, Len: in * out}, in)
	noError(t, err)
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rng.Uint64())
	data := make([]byte, p.Bytes)
	rand.NewChaCha8(seed).Read(data)
	end := p.Bytes
	if p.Second > 0 {
		end = p.Second
		for i := p.Second; i+2 <= p.Bytes; i += 2 { // zeros, or minima below 2^-10
			binary.LittleEndian.PutUint16(data[i:], binary.LittleEndian.Uint16(data[i:])%16)
		}
	}
	for i := p.Scales; i+p.Factor <= end; i += p.Factor {
		if p.Factor == 4 {
			binary.LittleEndian.PutUint32(data[i:], 0x3f<<24|binary.LittleEndian.Uint32(data[i:])%(1<<23))
		} else {
			binary.LittleEndian.PutUint16(data[i:], 0x38<<8|binary.LittleEndian.Uint16(data[i:])%(1<<10))
		}
	}
	return &p, m.Put(t, data, attn.Float32)
}

// testNarrowChain queues layers of all formats one behind the other, with one scratch, in one recording. Their outputs have the bits that
// each layer has alone, in every replay.
func testNarrowChain(t *testing.T, m *machine, d *Engine, replays int, shapes [][2]int, someRows ...int) {
	rng := reftest.Rand(t)
	most, widest := 0, 0
	for _, rows := range someRows {
		most = max(most, rows)
	}
	for _, s := range shapes {
		widest = max(widest, attn.Ceil(s[0], 256)*256)
	}
	x := m.random(t, rng, attn.Float32, most*widest, 1).Memory
	memory := []gpu.Memory{x}
	var ops []Linear
	var names []string
	need := 0
	for _, f := range packable() {
		for _, s := range shapes {
			in, out := attn.Ceil(s[0], f.Block())*f.Block(), s[1]
			p, w := m.putPacked(t, rng, f, in, out)
			memory = append(memory, w)
			for _, rows := range someRows {
				o := Linear{Rows: rows, In: in, X: x, Early: rng.IntN(4) > 0, RoundX: rng.IntN(4) > 0}
				o.Parts = []LinearPart{{W: w, Y: m.empty(t, rows*out), Out: out, Packed: p}}
				n, err := d.Scratch(&o)
				noError(t, err)
				need = max(need, n)
				memory = append(memory, o.Parts[0].Y)
				ops, names = append(ops, o), append(names, fmt.Sprintf("%v, %d rows of %d to %d, rounded %v, early %v", f, rows, in, out, o.RoundX, o.Early))
			}
		}
	}
	scratch := m.empty(t, max(need, 1))
	memory = append(memory, scratch)
	alone := make([][]byte, len(ops))
	for i := range ops {
		ops[i].Scratch = scratch
		noError(t, d.Linear(m.Stream, &ops[i]))
		m.Settle(t)
		alone[i] = enginetest.Read(t, &ops[i].Parts[0].Y)
	}
	rng.Shuffle(len(ops), func(i, j int) {
		ops[i], ops[j], alone[i], alone[j], names[i], names[j] = ops[j], ops[i], alone[j], alone[i], names[j], names[i]
	})
	g, err := m.Stream.Capture(func() error {
		for i := range ops {
			if err := d.Linear(m.Stream, &ops[i]); err != nil {
				return err
			}
		}
		return nil
	})
	noError(t, err)
	for replay := range replays {
		for i := range ops {
			y := &ops[i].Parts[0].Y
			noError(t, y.Buffer.Upload(y.Offset, bytes.Repeat([]byte{0xff}, len(alone[i]))))
		}
		for range min(replays, 3) {
			noError(t, m.Stream.Launch(g))
		}
		m.Settle(t)
		for i := range ops {
			if !bytes.Equal(enginetest.Read(t, &ops[i].Parts[0].Y), alone[i]) {
				t.Fatalf("replay %d, layer %d: %s: other bits than alone", replay, i, names[i])
			}
		}
	}
	noError(t, g.Close())
	for i := range memory {
		noError(t, memory[i].Buffer.Close())
	}
}

func TestGPUNarrowChain(t *testing.T) {
	m, d := realDecoder(t)
	if testing.Short() {
		testNarrowChain(t, m, d, 1, [][2]int{{1056, 777}}, 1, 16, 64)
		return
	}
	testNarrowChain(t, m, d, 8, [][2]int{{8192, 8192}, {4096, 14336}, {14336, 4096}, {1056, 777}}, 1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64)
}
