// Leanbench measures LeanAttention and draws the figures of its documentation.
//
//	leanbench COMMAND [flags]
//
// Without a command, leanbench lists its commands. "leanbench COMMAND -h" lists the flags of a command.
// Errors go to stderr. The exit status is 2 for a wrong command or flag and 1 for any other error.
package main

import (
	"os"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/cpu"
	"gorgonia.org/leanattention/cmd/leanbench/e2e"
	"gorgonia.org/leanattention/cmd/leanbench/figure"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/load"
	"gorgonia.org/leanattention/cmd/leanbench/paper"
	"gorgonia.org/leanattention/cmd/leanbench/report"
)

var commands = slices.Concat(cpu.Commands, gpu.Commands, e2e.Commands, load.Commands, figure.Commands, paper.Commands, report.Commands)

func main() { os.Exit(command.Run(commands, os.Args[1:], os.Stdout, os.Stderr)) }
