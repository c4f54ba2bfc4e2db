package layers

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
)

// BenchmarkGPUTraining is the gradients of a linear layer of float32, rows x in to rows x out: of x, of w and of the bias, beside the layer
// itself, and all of them with products of bfloat16. TFLOP/s count a multiplication and an addition for each product.
func BenchmarkGPUTraining(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range []struct{ rows, in, out int }{{512, 768, 3072}, {4096, 768, 3072}, {4096, 4096, 4096}, {8192, 768, 3072}, {8192, 3072, 768}, {8192, 4096, 14336}} {
		x, w, dy := m.filled(b, rng, attn.Float32, s.rows*s.in, 1), m.filled(b, rng, attn.Float32, s.out*s.in, 1), m.filled(b, rng, attn.Float32, s.rows*s.out, 1)
		y, dx, dw, db := m.empty(b, s.rows*s.out), m.empty(b, s.rows*s.in), m.empty(b, s.out*s.in), m.empty(b, s.out)
		layer := Linear{Rows: s.rows, In: s.in, X: x, Parts: []LinearPart{{W: w, Y: y, Out: s.out}}}
		n, err := d.Scratch(&layer)
		noError(b, err)
		if n > 0 {
			layer.Scratch = m.empty(b, n)
		}
		rounded := layer
		rounded.Products = attn.BFloat16
		toX := Product{M: s.rows, N: s.in, K: s.out, A: dy, B: w, C: dx, Products: attn.BFloat16}
		toW := Product{M: s.out, N: s.in, K: s.rows, Transposed: true, A: dy, B: x, C: dw, Products: attn.BFloat16}
		most, err := d.Scratch(&rounded)
		noError(b, err)
		for _, o := range []*Product{&toX, &toW} {
			n, err := d.ProductScratch(o)
			noError(b, err)
			most = max(most, n)
		}
		scratch := m.empty(b, most)
		rounded.Scratch, toX.Scratch, toW.Scratch = scratch, scratch, scratch
		for _, c := range []struct {
			name string
			run  func() error
		}{
			{"layer, rounded", func() error { return d.Linear(m.Stream, &rounded) }},
			{"dx, rounded", func() error { return d.Product(m.Stream, &toX) }},
			{"dw, rounded", func() error { return d.Product(m.Stream, &toW) }},
			{"layer", func() error { return d.Linear(m.Stream, &layer) }},
			{"dx", func() error { return d.Product(m.Stream, &Product{M: s.rows, N: s.in, K: s.out, A: dy, B: w, C: dx}) }},
			{"dw", func() error {
				return d.Product(m.Stream, &Product{M: s.out, N: s.in, K: s.rows, Transposed: true, A: dy, B: x, C: dw})
			}},
			{"db", func() error { return d.ColumnSums(m.Stream, &ColumnSums{Rows: s.rows, N: s.out, X: dy, Y: db}) }},
		} {
			b.Run(fmt.Sprintf("%dx%dx%d/%s", s.rows, s.in, s.out, c.name), func(b *testing.B) {
				took := m.median(b, 11, c.run)
				b.ReportMetric(took.Seconds()*1e6, "us")
				if c.name != "db" {
					b.ReportMetric(2*float64(s.rows)*float64(s.in)*float64(s.out)/took.Seconds()/1e12, "TFLOP/s")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
		for _, x := range []gpu.Memory{x, w, dy, y, dx, dw, db, layer.Scratch, scratch} {
			if x.Buffer != nil {
				noError(b, x.Buffer.Close())
			}
		}
	}
}

// BenchmarkGPULoss is the loss of rows of logits and its gradients. TFLOP/s count a multiplication and an addition for each product: one
// product for the loss, three for the gradients. The gradient of a table is beside them, with GB/s of dy and the table.
func BenchmarkGPULoss(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range []struct{ rows, width, vocabulary int }{{8192, 768, 50257}, {2048, 4096, 128256}} {
		o := Loss{Rows: s.rows, Width: s.width, Vocabulary: s.vocabulary}
		o.X, o.W, o.Scratch = m.filled(b, rng, attn.Float32, s.rows*s.width, 1), m.filled(b, rng, attn.Float32, s.vocabulary*s.width, 0.02), m.empty(b, m.lossScratch(b, d, &o))
		ids := make([]int, s.rows)
		for i := range ids {
			ids[i] = rng.IntN(s.vocabulary)
		}
		o.Targets, o.Y = m.putIDs(b, ids), m.empty(b, s.rows)
		grads := o
		grads.DY, grads.DX, grads.DW = m.filled(b, rng, attn.Float32, s.rows, 1), m.empty(b, s.rows*s.width), m.empty(b, s.vocabulary*s.width)
		loss, rounded := o, grads
		loss.Products, rounded.Products = attn.BFloat16, attn.BFloat16
		loss.Scratch = m.empty(b, m.lossScratch(b, d, &rounded))
		rounded.Scratch = loss.Scratch
		products := 2 * float64(s.rows) * float64(s.width) * float64(s.vocabulary)
		for _, c := range []struct {
			name        string
			flops, read float64
			run         func() error
		}{
			{"loss", products, 0, func() error { return d.Loss(m.Stream, &o) }},
			{"loss, rounded", products, 0, func() error { return d.Loss(m.Stream, &loss) }},
			{"gradients, rounded", 3 * products, 0, func() error { return d.Loss(m.Stream, &rounded) }},
			{"gradients", 3 * products, 0, func() error { return d.Loss(m.Stream, &grads) }},
			{"table", 0, 4 * float64(s.width) * float64(s.rows+s.vocabulary), func() error {
				return d.TableGradient(m.Stream, &TableGradient{Rows: s.rows, N: s.width, TableRows: s.vocabulary, IDs: o.Targets, DY: grads.DX, DTable: grads.DW})
			}},
		} {
			b.Run(fmt.Sprintf("%dx%dx%d/%s", s.rows, s.width, s.vocabulary, c.name), func(b *testing.B) {
				took := m.median(b, 11, c.run).Seconds()
				b.ReportMetric(took*1e6, "us")
				if c.flops > 0 {
					b.ReportMetric(c.flops/took/1e12, "TFLOP/s")
				} else {
					b.ReportMetric(c.read/took/1e9, "GB/s")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
		for _, x := range []gpu.Memory{o.X, o.W, o.Scratch, o.Targets, o.Y, grads.DY, grads.DX, grads.DW, loss.Scratch} {
			noError(b, x.Buffer.Close())
		}
	}
}
