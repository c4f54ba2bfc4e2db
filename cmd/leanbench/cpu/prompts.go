package cpu

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// promptCases returns causal prompts of one sequence with bars against PyTorch. PyTorch also rounds queries
// and attention weights to the type of the keys.
func promptCases(quick bool) (cases []stepShape) {
	for _, s := range measure.Storages {
		for _, heads := range []int{12, 32} {
			for _, tokens := range []int{1024, 2048, 8192} {
				for _, dim := range []int{64, 128} {
					if quick && (heads == 12) != (dim == 64) {
						continue
					}
					bar := measure.AtLeast(1)
					if s == measure.StoreF16 {
						bar = nil // PyTorch has no fast float16 kernel
					}
					cases = append(cases, stepShape{store: s.Name, heads: heads, queries: tokens, keys: tokens, dim: dim, causal: true, faster: bar})
				}
			}
		}
	}
	return cases
}

func tablePrompts(threads int) string {
	return fmt.Sprintf("Attention of causal prompts, against scaled_dot_product_attention, %d threads", threads)
}

// measurePrompts measures attention of prompts with each number of threads, and PyTorch if python is set.
func measurePrompts(o *measure.Options, threads, python, only string, stdout, stderr io.Writer) (err error) {
	counts, err := measure.Counts("threads", threads)
	if err != nil {
		return err
	}
	if len(counts) == 0 {
		counts = []int{o.Workers}
	}
	pattern, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	cases := slices.DeleteFunc(promptCases(o.Quick), func(c stepShape) bool { return !pattern.MatchString(c.String()) })
	if len(cases) == 0 {
		return fmt.Errorf("-only %v: no shape has such a name", pattern)
	}
	options := *o
	options.Workers = slices.Max(counts)
	b, err := newBench("cpu -prompts", &options, stdout, stderr)
	if err != nil {
		return err
	}
	var w *measure.Worker
	if python == "" {
		b.report.Notes = append(b.report.Notes, "PyTorch is left out: no -python")
	} else {
		if w, err = measure.StartWorker(python, gradientsWorker, fmt.Sprint(options.Workers)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.Close()) }()
		b.report.Notes = append(b.report.Notes, strings.Join(w.Hello, " "))
	}
	return b.prompts(w, counts, cases)
}

func (b *attentionBench) prompts(w *measure.Worker, threads []int, cases []stepShape) error {
	b.report.WriteHead(b.stdout)
	for _, n := range threads {
		runtime.GOMAXPROCS(n)
		if w != nil {
			if _, err := w.Ask("threads %d", n); err != nil {
				return err
			}
		}
		for _, c := range cases {
			fmt.Fprintf(b.stderr, "%d threads: %s\n", n, c)
			if err := b.measurePrompt(w, n, c); err != nil {
				return fmt.Errorf("%d threads: %s: %w", n, c, err)
			}
			if err := b.report.Save(b.json); err != nil {
				return err
			}
		}
		b.report.WriteTable(b.stdout, tablePrompts(n))
	}
	b.report.WriteVerdict(b.stdout)
	return nil
}

const (
	nameLean  = "lean"
	nameMixed = "lean, mixed precision"
)

// measurePrompt measures shape s. The contenders alternate: exact, mixed precision for 16-bit keys, and
// PyTorch.
func (b *attentionBench) measurePrompt(w *measure.Worker, threads int, s stepShape) error {
	exact, mixed, err := b.promptSteps(s)
	if err != nil {
		return err
	}
	contenders := []measure.Contender{{Name: nameLean, Run: measure.Timed(exact)}}
	judged := nameLean
	if mixed != nil {
		contenders = append(contenders, measure.Contender{Name: nameMixed, Run: measure.Timed(mixed)})
		judged = nameMixed
	}
	if w != nil {
		torch, err := s.torch(w)
		if err != nil {
			return err
		}
		contenders = append(contenders, torch)
	}
	all, err := measure.Alternate(b.pace, contenders)
	if err != nil {
		return err
	}
	for i, t := range all {
		name := contenders[i].Name
		r := b.report.Row(tablePrompts(threads), s.String(), name)
		r.Add(measure.StepMillis, 1e3*t.Median(), nil)
		r.Add(measure.Products, s.products()/t.Best(), nil)
		if w != nil && name != NameTorch {
			r.Add(measure.OverTorch, t.Faster(all[len(all)-1]), measure.Only(name == judged, s.faster))
		}
	}
	return nil
}

// promptSteps returns the steps of a shape by [la.Attend]. mixed is the step in mixed precision, and nil for
// float32.
func (b *attentionBench) promptSteps(s stepShape) (exact, mixed func() error, err error) {
	i := slices.IndexFunc(measure.Storages, func(x measure.Storage) bool { return x.Name == s.store })
	if i < 0 {
		return nil, nil, fmt.Errorf("%s is no type that is measured", s.store)
	}
	store := measure.Storages[i]
	n := s.heads * s.keys * s.dim
	arena := measure.NewArena(store, 2*n*store.Size, b.rng)
	sets := carve(arena, decodeShape{s.heads, s.heads, s.keys, s.dim, store}, 1)
	q := newQuery(decodeShape{heads: s.heads * s.queries, dim: s.dim}, b.rng)
	out := tensor.New(tensor.WithShape(1, s.heads, s.queries, s.dim), tensor.WithBacking(make([]float32, s.heads*s.queries*s.dim)))
	a := la.Args{Q: q, K: sets[0].k, V: sets[0].v, Out: out}
	if err := errors.Join(q.Reshape(1, s.heads, s.queries, s.dim), sets[0].k.Reshape(1, s.heads, s.keys, s.dim), sets[0].v.Reshape(1, s.heads, s.keys, s.dim)); err != nil {
		return nil, nil, err
	}
	var opts []la.Option
	if s.causal {
		opts = append(opts, la.WithCausal())
	}
	exact = func() error { return la.Attend(a, opts...) }
	if store == measure.StoreF32 {
		return exact, nil, nil
	}
	rounding := append(slices.Clone(opts), la.WithMixedPrecision())
	return exact, func() error { return la.Attend(a, rounding...) }, nil
}
