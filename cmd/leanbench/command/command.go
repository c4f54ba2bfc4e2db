// Package command defines and runs leanbench's commands.
package command

import (
	"errors"
	"flag"
	"fmt"
	"io"
)

// Command is a command of leanbench.
type Command struct {
	Name, Summary string
	Args          bool // arguments may follow the flags
	// Setup adds the command's flags and returns the function that runs after the flags are parsed.
	Setup func(flags *flag.FlagSet) func(stdout, stderr io.Writer) error
}

// Run runs the command that args[0] names with the remaining arguments and returns the exit status. All input
// and output of main is passed in.
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
