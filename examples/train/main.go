// Command train trains a model of one decoder layer on a small text, once with leanattention's node and once with
// attention made of Gorgonia's own ops, from the same seed: the losses are equal, the memory is not.
//
//	go run gorgonia.org/leanattention/examples/train -steps 300 -svg train.svg
//
// The command prints the loss of both, and then the bytes that a step of each allocates at growing contexts, as the
// runtime counts them; -svg draws both. -attn lean or default trains with one of them only.
//
// Exit status: 0; 1 after a failed computation or write; 2 for wrong flags.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// options are the flags.
type options struct {
	steps int
	attn  string
	svg   string
	seed  uint64
}

// attention is the attention of a layer.
type attention struct {
	name  string
	apply func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error)
}

var attentions = []attention{{"default", la.Default}, {"lean", la.Attention}}

// chosen returns the attentions that -attn names.
func (o *options) chosen() []attention {
	for i, a := range attentions {
		if o.attn == a.name {
			return attentions[i : i+1]
		}
	}
	return attentions
}

// errUsage is a wrong flag that flag.Parse has reported.
var errUsage = errors.New("wrong flags")

func parse(args []string, stderr io.Writer) (*options, error) {
	o := new(options)
	f := flag.NewFlagSet("train", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&o.steps, "steps", 300, "training `steps`, at least 1")
	f.StringVar(&o.attn, "attn", "both", "attention to train with: lean, default or both")
	f.StringVar(&o.svg, "svg", "", "draw the losses and the memory to an SVG `file`")
	f.Uint64Var(&o.seed, "seed", 1, "`seed` of the weights and of the order of the text")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil, err
		}
		return nil, errUsage
	}
	var wrong string
	switch {
	case f.NArg() > 0:
		wrong = fmt.Sprintf("arguments %q", f.Args())
	case o.steps < 1:
		wrong = fmt.Sprintf("-steps %d", o.steps)
	case o.attn != "both" && len(o.chosen()) != 1:
		wrong = fmt.Sprintf("-attn %q", o.attn)
	default:
		return o, nil
	}
	fmt.Fprintf(stderr, "train: %s; train -h lists the flags\n", wrong)
	return nil, errUsage
}

// run runs the command and returns the exit status.
func run(args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	if err := train(o, stdout); err != nil {
		fmt.Fprintf(stderr, "train: %v\n", err)
		return 1
	}
	return 0
}

// result is the result of one attention.
type result struct {
	attention
	losses []float64     // of each step
	took   time.Duration // of all steps
	memory []float64     // bytes that a step allocates, for each of contexts
}

// train does the work of the command.
func train(o *options, stdout io.Writer) error {
	results := make([]result, len(o.chosen()))
	for i, a := range o.chosen() {
		results[i].attention = a
		if err := results[i].learn(o); err != nil {
			return err
		}
	}
	printLosses(stdout, results)
	for i := range results {
		if err := results[i].measure(o.seed); err != nil {
			return err
		}
	}
	printMemory(stdout, results)
	if o.svg == "" {
		return nil
	}
	return os.WriteFile(o.svg, draw(results), 0o644)
}

// learn trains the model.
func (r *result) learn(o *options) error {
	m, err := newModel(r.apply, trained, o.seed)
	if err != nil {
		return err
	}
	defer m.close()
	begin := time.Now()
	for range o.steps {
		loss, err := m.step()
		if err != nil {
			return err
		}
		r.losses = append(r.losses, loss)
	}
	r.took = time.Since(begin)
	return nil
}

func printLosses(w io.Writer, results []result) {
	fmt.Fprintf(w, "loss, nats a character\n  step")
	for _, r := range results {
		fmt.Fprintf(w, "%10s", r.name)
	}
	fmt.Fprintln(w)
	n := len(results[0].losses)
	for i := range n {
		if i%25 != 0 && i != n-1 {
			continue
		}
		fmt.Fprintf(w, "%6d", i+1)
		for _, r := range results {
			fmt.Fprintf(w, "%10.4f", r.losses[i])
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "    ms")
	for _, r := range results {
		fmt.Fprintf(w, "%10.1f", r.took.Seconds()*1e3/float64(n))
	}
	fmt.Fprintln(w, "  a step")
	if len(results) == 2 {
		most := 0.0
		for i, loss := range results[0].losses {
			most = max(most, math.Abs(loss-results[1].losses[i]))
		}
		fmt.Fprintf(w, "the losses differ by %.2g at most\n", most)
	}
}

func printMemory(w io.Writer, results []result) {
	fmt.Fprintf(w, "\nmemory, MiB that a step allocates\ncontext")
	for _, r := range results {
		fmt.Fprintf(w, "%10s", r.name)
	}
	fmt.Fprintln(w)
	for i, n := range contexts {
		fmt.Fprintf(w, "%7d", n)
		for _, r := range results {
			fmt.Fprintf(w, "%10.1f", r.memory[i]/(1<<20))
		}
		fmt.Fprintln(w)
	}
}
