// Package cpu measures attention on this machine's cores, alone and against PyTorch.
package cpu

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"regexp"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Commands lists the commands of this package.
var Commands = []command.Command{
	{Name: "cpu", Summary: "attention on this machine's cores: share of the memory's speed, and against Gorgonia's nodes", Setup: measureCPU},
	{Name: "peers", Summary: "attention against PyTorch on the same cores", Setup: measurePeers},
	{Name: "forks", Summary: "a token of each of several forks, which attend to what they have in common once", Setup: measureForks},
	{Name: "gradients", Summary: "prompts and gradients, in float64 and float32, against PyTorch on the same cores", Setup: measureGradients},
}

// measureCPU measures attention on this machine's cores: its share of the read ceiling, and its speedup over
// Gorgonia's own nodes.
func measureCPU(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	o := measure.Flags(flags)
	only := flags.String("only", "", "measure only the shapes in whose names this `pattern` is found, as \"f16, 32/4\"")
	prompts := flags.Bool("prompts", false, "measure prompts instead of single tokens, against PyTorch with -python")
	threads := flags.String("threads", "", "with -prompts: `numbers` of threads, such as 1,8,16 (default: that of -workers)")
	python := flags.String("python", "", "with -prompts: `path` of a python that has PyTorch; peers/setup.sh makes one and prints it")
	return func(stdout, stderr io.Writer) error {
		if *prompts {
			return measurePrompts(o, *threads, *python, *only, stdout, stderr)
		}
		if *threads != "" || *python != "" {
			return errors.New("-threads and -python say nothing without -prompts")
		}
		pattern, err := regexp.Compile(*only)
		if err != nil {
			return fmt.Errorf("-only: %w", err)
		}
		b, err := newBench("cpu", o, stdout, stderr)
		if err != nil {
			return err
		}
		return b.cpu(pattern)
	}
}

// memorySize is the size of the keys and values, in bytes, where a measurement is bound by memory: those of
// one step, or of all sets that steps cycle through. It is many times the size of any cache.
const memorySize = 256 << 20

// attentionBench measures one decode shape at a time.
type attentionBench struct {
	report         *measure.Report
	json           string // file for the report, saved after each case
	pace           measure.Pace
	stdout, stderr io.Writer
	rng            *rand.Rand
	arena          *measure.Arena // arena of the element type measured last
}

// newBench returns a bench for a command on this machine.
func newBench(command string, o *measure.Options, stdout, stderr io.Writer) (*attentionBench, error) {
	m, err := measure.ThisMachine(o.Workers)
	if err != nil {
		return nil, err
	}
	return &attentionBench{
		report: &measure.Report{Command: command, Machine: m, Figures: []measure.Figure{}}, json: o.JSON,
		pace: o.Pace(), stdout: stdout, stderr: stderr,
		rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}, nil
}

// one is a case of a table.
type one struct {
	table   string
	shape   decodeShape
	inCache bool         // every step reads the same operands; otherwise steps cycle through sets of operands
	stock   bool         // measures the default node, too
	share   *measure.Bar // of Attend and of the node
	faster  *measure.Bar // speedup of both over the default node
	allocs  *measure.Bar // of Attend
}

const (
	tableMemory  = "Keys and values of 256 MB and more"
	tableCache   = "12 heads x 1024 x 64, the same keys and values in every step"
	tableContext = "Contexts, 12 heads of 64, keys and values from memory"
)

// cpu measures the shapes whose names match only.
func (b *attentionBench) cpu(only *regexp.Regexp) error {
	b.report.WriteHead(b.stdout)
	found := false
	for _, table := range []struct {
		name  string
		cases []one
	}{{tableMemory, memoryCases()}, {tableCache, cacheCases()}, {tableContext, contextCases()}} {
		some := false
		for _, c := range table.cases {
			if !only.MatchString(c.shape.String()) {
				continue
			}
			some = true
			c.table = table.name
			fmt.Fprintf(b.stderr, "%s: %s\n", c.table, c.shape)
			if err := b.measure(c); err != nil {
				return fmt.Errorf("%s: %w", c.shape, err)
			}
			if err := b.report.Save(b.json); err != nil {
				return err
			}
		}
		if some {
			found = true
			b.report.WriteTable(b.stdout, table.name)
		}
	}
	if !found {
		return fmt.Errorf("-only %v: no shape has such a name", only)
	}
	b.report.WriteVerdict(b.stdout)
	return nil
}

// memoryCases returns steps that each read memorySize bytes.
func memoryCases() (cases []one) {
	for _, s := range measure.Storages {
		for _, heads := range [][2]int{{32, 32}, {32, 8}, {32, 4}} {
			for _, dim := range []int{64, 128} {
				shape := decodeShape{heads: heads[0], kvHeads: heads[1], keys: 1, dim: dim, storage: s}
				shape.keys = memorySize / shape.bytes()
				least := 0.85
				switch {
				case shape.heads != shape.kvHeads:
					least = 0.80
				case s == measure.StoreF32:
					least = 0.90
				}
				cases = append(cases, one{shape: shape, stock: s == measure.StoreF32, share: measure.OfCeiling(least)})
			}
		}
	}
	return cases
}

// cacheCases returns the size that a Gorgonia user is likely to have.
func cacheCases() (cases []one) {
	for _, s := range measure.Storages {
		c := one{shape: decodeShape{12, 12, 1024, 64, s}, inCache: true, allocs: measure.AtMost(0)}
		if s == measure.StoreF32 {
			c.stock, c.faster = true, measure.AtLeast(8)
		}
		cases = append(cases, c)
	}
	return cases
}

// contextCases returns contexts from 128 to 65536 keys.
func contextCases() (cases []one) {
	for _, s := range measure.Storages {
		for keys := 128; keys <= 65536; keys *= 2 {
			cases = append(cases, one{shape: decodeShape{12, 12, keys, 64, s}, stock: s == measure.StoreF32})
		}
	}
	return cases
}

// operands returns the operands of a case. The bench keeps one arena, because arenas of several element types
// may exceed the machine's memory.
func (b *attentionBench) operands(c one) []operands {
	size, most := max(memorySize, c.shape.bytes()), math.MaxInt
	if c.inCache {
		size, most = c.shape.bytes(), 1
	}
	if b.arena == nil || b.arena.Storage != c.shape.storage || 8*len(b.arena.Words) < size {
		b.arena = nil // frees the old arena before the new one is allocated
		b.arena = measure.NewArena(c.shape.storage, size, b.rng)
	}
	return carve(b.arena, c.shape, most)
}

func (b *attentionBench) measure(c one) error {
	sets, q := b.operands(c), newQuery(c.shape, b.rng)
	inNode, err := leanNode(c.shape, q, sets)
	if err != nil {
		return err
	}
	attenders := []attender{attend(c.shape, q, sets), inNode}
	if c.stock {
		stock, err := stockNode(c.shape, q, sets)
		if err != nil {
			return err
		}
		attenders = append(attenders, stock)
	}
	if err := agree(attenders); err != nil {
		return err
	}
	contenders := []measure.Contender{ceiling(sets)}
	for _, a := range attenders {
		contenders = append(contenders, a.Contender)
	}
	all, err := measure.Alternate(b.pace, contenders)
	if err != nil {
		return err
	}
	for i, s := range all {
		r := b.report.Row(c.table, c.shape.String(), contenders[i].Name)
		bytes := float64(c.shape.bytes())
		r.Add(measure.Speed, bytes/s.Median()/1e9, nil)
		r.Add(measure.BestSpeed, bytes/s.Best()/1e9, nil)
		if i == 0 {
			continue
		}
		lean := i <= 2
		r.Add(measure.Share, s.Faster(all[0]), measure.Only(lean, c.share))
		if lean && c.stock {
			r.Add(measure.OverStock, s.Faster(all[3]), c.faster)
		}
		// A slow step needs only a few runs: the number of allocations is the same in every step.
		steps := min(max(int(b.pace.Turn.Seconds()/s.Median()), 2), 100)
		n, err := measure.Allocations(contenders[i], steps)
		if err != nil {
			return err
		}
		r.Add(measure.Allocs, n, measure.Only(i == 1, c.allocs))
	}
	return nil
}
