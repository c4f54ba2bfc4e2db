// Leanbench measures LeanAttention and draws what its documentation shows.
//
//	leanbench COMMAND [flags]
//
// leanbench without a command lists them, and leanbench COMMAND -h the flags of
// one. Errors go to stderr: exit status 1, and 2 for wrong commands and flags.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

// command is one thing that leanbench does.
type command struct {
	name, summary string
	// setup adds the command's flags and returns what runs once they are parsed.
	setup func(flags *flag.FlagSet) func(stdout, stderr io.Writer) error
}

var commands = []command{
	{"cpu", "attention on this machine's cores: share of the memory's speed, and against Gorgonia's nodes", cpuBench},
	{"checkpoint", "write an OPT model with random weights", makeCheckpoint},
	{"e2e", "decoding with an OPT model, against transformers and CTranslate2; on a GPU against transformers", e2eBench},
	{"figure", "draw the schedules of docs/schedule.svg", drawFigure},
	{"gpu", "attention on a GPU: share of its memory's speed, and against PyTorch and FlashInfer", gpuCommand},
	{"gputables", "the tables of docs/benchmarks.md, of what gpu -full -json wrote", gpuTablesCommand},
	{"peers", "attention against PyTorch on the same cores", peersBench},
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is main with everything from outside passed in. It returns the exit status.
func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		usage(stderr)
		return 2
	}
	for _, c := range commands {
		if c.name != args[0] {
			continue
		}
		flags := flag.NewFlagSet("leanbench "+c.name, flag.ContinueOnError)
		flags.SetOutput(stderr)
		do := c.setup(flags)
		if err := flags.Parse(args[1:]); errors.Is(err, flag.ErrHelp) {
			return 0
		} else if err != nil { // Parse has printed it
			return 2
		}
		if flags.NArg() > 0 {
			fmt.Fprintf(stderr, "leanbench %s: unexpected argument %q\n", c.name, flags.Arg(0))
			return 2
		}
		if err := do(stdout, stderr); err != nil {
			fmt.Fprintf(stderr, "leanbench %s: %v\n", c.name, err)
			return 1
		}
		return 0
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		usage(stdout)
		return 0
	}
	fmt.Fprintf(stderr, "leanbench: unknown command %q\n", args[0])
	usage(stderr)
	return 2
}

func usage(w io.Writer) {
	fmt.Fprintln(w, "usage: leanbench COMMAND [flags]")
	for _, c := range commands {
		fmt.Fprintf(w, "  %-10s %s\n", c.name, c.summary)
	}
}
