/* Lets a person in, asked by PAM (pam_exec) once sshd is content with his key: only if his home answers, and as a part of
 * his share of this machine, where there are shares. A file server that hangs would keep the session in the kernel for
 * ever and its person without a word. One program for both: what sshd spends on starting one is more than what either
 * does. */
#define _GNU_SOURCE
#include "home.h"
#include "share.h"

int main(void) {
    const char *user = getenv("PAM_USER");
    if (!user) {
        fputs("usage: PAM_USER=NAME admit, from pam_exec\n", stderr);
        return 2;
    }
    /* Who is not known has been turned away by the modules before, or will be by those behind. */
    const struct passwd *person = getpwnam(user);
    if (!person)
        return 0;
    uid_t number = person->pw_uid;
    if (home_answers(user, person->pw_dir)) {
        take_share(number, getppid());
        return 0;
    }
    printf("Your home %s does not answer: its file server is slow or away. Jobs go on running; please try again later.\n",
           person->pw_dir);
    return 1;
}
