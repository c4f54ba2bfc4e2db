package cpu

import (
	_ "embed"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/internal/cpu/gradient"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/tensor"
)

//go:embed gradients.py
var gradientsWorker string

// measureGradients measures prompts and their gradients against PyTorch.
var measureGradients = againstTorch("gradients", gradientsWorker, (*attentionBench).gradients)

const tableGradients = "Prompts and gradients, against scaled_dot_product_attention"

// stepShape is the shape of a step of one sequence. queries is keys or 1.
type stepShape struct {
	store                string // element type of all operands: f32 or f64; prompts also use 16 bits for keys and values
	heads, queries, keys int
	dim                  int
	causal, backward     bool
	faster               *measure.Bar // bar of the speedup over PyTorch
}

func (s stepShape) String() string {
	name := fmt.Sprintf("%s, %d heads x %d x %d", s.store, s.heads, s.keys, s.dim)
	switch {
	case s.queries == 1:
		return name + ", one query, in cache"
	case s.causal:
		name += ", causal"
	}
	if s.backward {
		return name + ", forward and backward"
	}
	return name + ", forward"
}

// products returns the arithmetic of a step in Gop. A multiplication and an addition count as two operations.
func (s stepShape) products() float64 {
	pairs := float64(s.queries) * float64(s.keys)
	if s.causal && s.queries > 1 {
		pairs = float64(s.queries) * float64(s.queries+1) / 2
	}
	matrices := 2.0
	if s.backward {
		matrices = 7
	}
	return 2 * matrices * float64(s.heads) * pairs * float64(s.dim) / 1e9
}

// torch makes a worker create its operands and returns the worker's contender.
func (s stepShape) torch(w *measure.Worker) (measure.Contender, error) {
	_, err := w.Ask("shape %d %d %d %d %s %t %t", s.heads, s.queries, s.keys, s.dim, s.store, s.causal, s.backward)
	return measure.Contender{Name: NameTorch, Run: w.Steps("run"), Settle: measure.TorchSettle}, err
}

// gradientCases returns training shapes and a decode step, in float64 and float32.
func gradientCases() (cases []stepShape) {
	for _, store := range []string{"f64", "f32"} {
		for _, n := range []int{1024, 2048} {
			for _, causal := range []bool{false, true} {
				for _, backward := range []bool{false, true} {
					bar := measure.AtLeast(1)
					if store == "f32" && backward {
						bar = measure.AtLeast(1.2)
					}
					cases = append(cases, stepShape{store, 12, n, n, 64, causal, backward, bar})
				}
			}
		}
		cases = append(cases, stepShape{store: store, heads: 12, queries: 1, keys: 1024, dim: 64, faster: measure.AtLeast(1)})
	}
	return cases
}

func (b *attentionBench) gradients(w *measure.Worker) error {
	b.report.WriteHead(b.stdout)
	for _, c := range gradientCases() {
		fmt.Fprintln(b.stderr, c)
		if err := b.measureGradients(w, c); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		if err := b.report.Save(b.json); err != nil {
			return err
		}
	}
	b.report.WriteTable(b.stdout, tableGradients)
	b.report.WriteVerdict(b.stdout)
	return nil
}

func (b *attentionBench) measureGradients(w *measure.Worker, s stepShape) error {
	step := newStep[float32]
	if s.store == "f64" {
		step = newStep[float64]
	}
	torch, err := s.torch(w)
	if err != nil {
		return err
	}
	all, err := measure.Alternate(b.pace, []measure.Contender{
		{Name: nameLean, Run: measure.Timed(step(s, b.rng))},
		torch,
	})
	if err != nil {
		return err
	}
	for i, t := range all {
		r := b.report.Row(tableGradients, s.String(), []string{nameLean, NameTorch}[i])
		r.Add(measure.StepMillis, 1e3*t.Median(), nil)
		r.Add(measure.Products, s.products()/t.Best(), nil)
		if i == 0 {
			r.Add(measure.OverTorch, t.Faster(all[1]), s.faster)
		}
	}
	return nil
}

// newStep returns a step of shape s: [la.Attend], followed, if s.backward is set, by the gradients for a
// random gradient of the output.
func newStep[F float32 | float64](s stepShape, rng *rand.Rand) func() error {
	of := func(rows int) []F {
		x := make([]F, s.heads*rows*s.dim)
		for i := range x {
			x[i] = F(rng.NormFloat64())
		}
		return x
	}
	q, k, v, out := of(s.queries), of(s.keys), of(s.keys), of(s.queries)
	lse := make([]F, s.heads*s.queries)
	dense := func(x []F, shape ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	args := la.Args{
		Q: dense(q, 1, s.heads, s.queries, s.dim), K: dense(k, 1, s.heads, s.keys, s.dim), V: dense(v, 1, s.heads, s.keys, s.dim),
		Out: dense(out, 1, s.heads, s.queries, s.dim), LSE: dense(lse, 1, s.heads, s.queries),
	}
	var opts []la.Option
	if s.causal {
		opts = append(opts, la.WithCausal())
	}
	if !s.backward {
		return func() error { return la.Attend(args, opts...) }
	}
	shape := &gradient.Shape{
		Batch: 1, Heads: s.heads, KVHeads: s.heads, Queries: s.queries, Keys: s.keys, Dim: s.dim, ValueDim: s.dim,
		Scale: 1 / math.Sqrt(float64(s.dim)), Mask: attn.Mask{Causal: s.causal},
	}
	ops := &gradient.Operands[F]{
		Q: q, K: k, V: v, Out: out, LSE: lse, DOut: of(s.queries), DQ: of(s.queries), DK: of(s.keys), DV: of(s.keys),
	}
	return func() error {
		if err := la.Attend(args, opts...); err != nil {
			return err
		}
		return gradient.Run(cpu.Default(), shape, ops)
	}
}
