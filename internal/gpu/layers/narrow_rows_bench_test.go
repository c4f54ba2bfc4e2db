package layers

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/weight"
)

// BenchmarkGPUNarrowRows is linear layers of 512 and 2048 rows with weights of 16, 8 and 4 bits, whose x is rounded to 16 bits or, "quantised", to 8 bits
// by row. "before": in launches of 64 rows.
func BenchmarkGPUNarrowRows(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range []struct {
		in, out int
		gate    bool
	}{{4096, 4096, false}, {4096, 6144, false}, {4096, 28672, false}, {14336, 4096, false}, {4096, 14336, true}} {
		for _, rows := range []int{128, 512, 2048} {
			name := fmt.Sprintf("%dx%dx%d", rows, s.in, s.out)
			if s.gate {
				name += "gated"
			}
			b.Run(name, func(b *testing.B) {
				for _, of := range []struct {
					f        weight.Format
					quantise bool
					before   bool
				}{{f: weight.Float16}, {weight.Int8, true, false}, {weight.E4M3, true, false}, {f: weight.Int8}, {f: weight.Int8, before: true}, {f: weight.E4M3}, {f: weight.Int4_128}, {f: weight.Int4_32}, {f: weight.Q8_0}} {
					if of.before && (rows > 512 || s.gate) {
						continue
					}
					name := of.f.String()
					if of.quantise {
						name += "quantised"
					}
					if d.leastWide = min(leastWideRows, rows); of.before {
						name += "before"
						d.leastWide = rows + 1
					}
					b.Run(name, func(b *testing.B) { benchmarkRows(b, m, d, rng, rows, s.in, s.out, s.gate, of.f, of.quantise) })
				}
			})
		}
	}
}

func benchmarkRows(b *testing.B, m *machine, d *Engine, rng *rand.Rand, rows, in, out int, gate bool, f weight.Format, quantise bool) {
	const layers = 2
	x, y := m.filled(b, rng, attn.Float32, rows*in, 1), m.filled(b, rng, attn.Float32, rows*out, 1)
	memory := []gpu.Memory{x, y}
	var ops [layers]Linear
	for i := range ops {
		ops[i] = Linear{Rows: rows, In: in, X: x, Early: true, RoundX: true, QuantiseX: quantise, Gate: gate}
		parts := 1
		if gate {
			parts, ops[i].Activation = 2, attn.SiLU
		}
		for range parts {
			p := LinearPart{Y: y, Out: out}
			if f == weight.Float16 {
				p.W = m.filled(b, rng, attn.Float16, in*out, 1)
			} else {
				p.Packed, p.W = m.aligned(b, rng, f, in, out)
			}
			memory = append(memory, p.W)
			ops[i].Parts = append(ops[i].Parts, p)
		}
		n, err := d.Scratch(&ops[i])
		noError(b, err)
		ops[i].Scratch = m.filled(b, rng, attn.Float32, max(n, 1), 1)
		memory = append(memory, ops[i].Scratch)
	}
	took := m.median(b, 11, func() error {
		for i := range ops {
			if err := d.Linear(m.Stream, &ops[i]); err != nil {
				return err
			}
		}
		return nil
	}) / layers
	if quantise {
		alone := m.median(b, 11, func() error {
			for i := range ops {
				p, err := d.planRows(&ops[i])
				if err != nil {
					return err
				}
				d.mu.Lock()
				err = d.quantiseRows(m.Stream, &ops[i], &p, p.launches[0].kind)
				d.mu.Unlock()
				if err != nil {
					return err
				}
			}
			return nil
		}) / layers
		b.ReportMetric(alone.Seconds()*1e6, "us/operands")
	}
	b.ReportMetric(took.Seconds()*1e6, "us")
	b.ReportMetric(2*float64(rows)*float64(in)*float64(out)*float64(len(ops[0].Parts))/took.Seconds()/1e12, "TFLOP/s")
	b.ReportMetric(0, "ns/op")
	for i := range memory {
		if memory[i].Buffer != nil {
			noError(b, memory[i].Buffer.Close())
		}
	}
}

// aligned returns packed weights near a normal distribution, in memory that begins with a line of the L2 cache.
func (m *machine) aligned(b *testing.B, rng *rand.Rand, f weight.Format, in, out int) (*weight.Packed, gpu.Memory) {
	p, err := weight.Packing(&weight.Matrix{Format: f, Len: in * out}, in)
	noError(b, err)
	data := make([]byte, p.Bytes)
	var some [1 << 16]byte
	for i := range some {
		v := rng.NormFloat64()
		switch {
		case f == weight.E4M3:
			some[i] = byte(half.E4M3FromFloat32(float32(v * 100)))
		case p.Kernels == "int4":
			some[i] = byte(rng.Uint32())
		default:
			some[i] = byte(int(v*30) + 128)
		}
	}
	for i := 0; i < p.Scales; i += len(some) {
		copy(data[i:p.Scales], some[:])
	}
	for i := p.Scales; i+4 <= p.Bytes; i += 4 { // the bits of a float32, or of two float16 and of two zeros
		if bits := math.Float32bits(1e-3); p.Factor == 4 {
			binary.LittleEndian.PutUint32(data[i:], bits)
		} else if i < p.Second || p.Second == 0 {
			binary.LittleEndian.PutUint32(data[i:], 0x14181418)
		} else {
			binary.LittleEndian.PutUint32(data[i:], 0x00080008)
		}
	}
	to, err := m.Dev.NewBuffer(int64(len(data)))
	noError(b, err)
	noError(b, to.Upload(0, data))
	return &p, gpu.Memory{Buffer: to, DType: attn.Float32, Len: len(data) / 4}
}
