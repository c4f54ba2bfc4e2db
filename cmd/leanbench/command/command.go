// Package command is what leanbench's commands are, and how one is run.
package command

import (
	"errors"
	"flag"
	"fmt"
	"io"
)

// Command is one thing that leanbench does.
type Command struct {
	Name, Summary string
	Args          bool // there may be some behind the flags
	// Setup adds the command's flags and returns what runs once they are parsed.
	Setup func(flags *flag.FlagSet) func(stdout, stderr io.Writer) error
}

// Run is main with everything from outside passed in: the command that the first
// argument names gets the others. It returns the exit status.
func Run(commands []Command, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		usage(commands, stderr)
		return 2
	}
	for _, c := range commands {
		if c.Name != args[0] {
			continue
		}
		flags := flag.NewFlagSet("leanbench "+c.Name, flag.ContinueOnError)
		flags.SetOutput(stderr)
		do := c.Setup(flags)
		if err := flags.Parse(args[1:]); errors.Is(err, flag.ErrHelp) {
			return 0
		} else if err != nil { // Parse has printed it
			return 2
		}
		if flags.NArg() > 0 && !c.Args {
			fmt.Fprintf(stderr, "leanbench %s: unexpected argument %q\n", c.Name, flags.Arg(0))
			return 2
		}
		if err := do(stdout, stderr); err != nil {
			fmt.Fprintf(stderr, "leanbench %s: %v\n", c.Name, err)
			return 1
		}
		return 0
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		usage(commands, stdout)
		return 0
	}
	fmt.Fprintf(stderr, "leanbench: unknown command %q\n", args[0])
	usage(commands, stderr)
	return 2
}

func usage(commands []Command, w io.Writer) {
	fmt.Fprintln(w, "usage: leanbench COMMAND [flags]")
	for _, c := range commands {
		fmt.Fprintf(w, "  %-10s %s\n", c.Name, c.Summary)
	}
}
